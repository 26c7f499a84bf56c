"""The engine's name and version decide whether ids are physical, whatever the letters of the name and the form."""

import numpy as np
import pytest

from foreroute.capture import decode
from foreroute.errors import CaptureError
from tests import wires

RNG = np.random.default_rng(8)
R = wires.rollout(RNG)
NPY = wires.npy(R.all_layers())
ALONE = {"array": R.all_layers(), "npy": NPY, "verl": wires.verl([R])}
OF_SGLANG = {"meta_info": wires.sglang(R), "sglext": wires.sglang_openai(R), **ALONE}


def decoded(output, **kwargs):
    return decode(output, model=R.spec, token_ids=[R.tokens], **kwargs)


@pytest.mark.parametrize("form", OF_SGLANG)
@pytest.mark.parametrize("name", ["sglang", "SGLang", "SGLANG"])
@pytest.mark.parametrize("version", ["0.5.9", "v0.5.9.post1", "0.4"])
def test_physical_ids_of_sglang_are_refused_in_every_form_and_spelling(form, name, version):
    with pytest.raises(CaptureError, match=r"ids are physical.*0\.5\.10 or newer"):
        decoded(OF_SGLANG[form], engine=name, engine_version=version)


@pytest.mark.parametrize("form", OF_SGLANG)
def test_a_newer_sglang_is_read_in_every_form(form):
    trace = decoded(OF_SGLANG[form], engine="SGLang", engine_version="0.5.10")
    assert trace.provenance["engine"] == "sglang"
    assert np.array_equal(trace.expert_ids_NLK[:-1], R.routes_RLK)


@pytest.mark.parametrize("name", ["sgl", "sglang ", "vlm", "sglang-jax", "trt", 5, [], None, b"vllm", {"vllm"}])
def test_an_unknown_engine_is_refused_with_the_list_of_known_ones(name):
    with pytest.raises(CaptureError, match=r"engine is .*expected one of vllm, sglang, or nothing"):
        decoded(R.all_layers(), engine=name)


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_every_listed_engine_is_known(name):
    assert decoded(R.all_layers(), engine=name.upper()).provenance["engine"] == name


@pytest.mark.parametrize(
    ("form", "name"),
    [("meta_info", "vllm"), ("sglext", "vllm"), ("vllm", "sglang")],
)
def test_an_engine_that_does_not_write_the_form_is_refused(form, name):
    output = {**OF_SGLANG, "vllm": wires.vllm_narrow(R)}[form]
    with pytest.raises(CaptureError, match=f"engine is '{name}', but the output has the form"):
        decoded(output, engine=name)


@pytest.mark.parametrize("version", ["new", "main", "-", 5, None, 0.5, ["0.5.12"]])
def test_a_version_that_cannot_be_read_is_refused(version):
    with pytest.raises(CaptureError, match="engine_version is"):
        decoded(wires.sglang(R), engine_version=version)


@pytest.mark.parametrize("form", ALONE)
def test_a_version_of_nobody_is_refused(form):
    with pytest.raises(CaptureError, match=r"engine_version is '0\.5\.9' of engine \?; expected text .* and engine="):
        decoded(ALONE[form], engine_version="0.5.9")


def test_the_form_names_the_engine_where_the_caller_does_not():
    with pytest.raises(CaptureError, match="ids are physical"):
        decoded(wires.sglang(R), engine_version="0.5.9")
    assert decoded(wires.vllm_http(R), engine_version="0.1").provenance["engine"] == "vllm"
