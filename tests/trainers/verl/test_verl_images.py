"""verl's FSDP engine on a batch with images: packed positions on four axes, and routes of the tokens of images."""

import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="there is no verl in this environment: run `make night PART=verl`")

from verl.utils import tensordict_utils as tu

from examples.verl.tiny_checkpoint import VOCABULARY, save_policy
from foreroute.adapters import hf
from tests.trainers.given_experts import watched
from tests.trainers.verl.verl_book import RESPONSE, Book
from tests.trainers.verl.verl_engines import make, old_log_probs, tensordict, update
from tests.trainers.vision_language import PATCH_VALUES, policy

IMAGE, VIDEO, START = 250, 251, 252
SHAPES = ((1, 2, 4), None, (1, 2, 2), (1, 2, 4))
"""Of the images of the sequences, of 2, no, 1 and 2 tokens."""


class ImageBook(Book):
    """Sequences with images."""

    def __init__(self, folder):
        rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
        self.folder, self.pairs, self.images, self.given = folder, [], [], []
        self.model = policy(VOCABULARY, image=IMAGE, video=VIDEO, start=START).eval()
        save_policy(folder)  # for its tokenizer
        self.model.save_pretrained(folder)
        self.routed = hf.attach(self.model)
        for shape in SHAPES:
            images, tokens = {}, []
            if shape is not None:
                patches = shape[1] * shape[2]
                images = {"pixel_values": torch.randn(patches, PATCH_VALUES, generator=generator)}
                images["image_grid_thw"] = torch.tensor([shape])
                tokens = [START, *[IMAGE] * (patches // 4)]
            prompt = np.array([*rng.integers(2, 200, 2), *tokens, rng.integers(2, 200)])
            self.pairs.append((prompt, rng.integers(2, 200, int(rng.integers(3, RESPONSE + 1)))))
            self.images.append(images)
            self.given.append(images | types_of(torch.from_numpy(np.concatenate(self.pairs[-1]))[None]))
        self.draw(rng, 0.3, spread=0.02, first=0.0)

    def batch(self):
        batch = super().batch()
        positions = batch["position_ids"][:, None].repeat(1, 4, 1)
        for s, images in enumerate(self.images):
            kept = batch["attention_mask"][s].bool()
            ids = batch["input_ids"][s, kept][None]
            axes, _ = self.model.model.get_rope_index(ids, image_grid_thw=images.get("image_grid_thw"), **types_of(ids))
            positions[s, 1:, kept] = axes[:, 0]
        return batch | {"position_ids": positions}

    def tensordict(self, **settings):
        td = tensordict(self.batch(), **settings)
        tu.assign_non_tensor_stack(td, "multi_modal_inputs", self.images)
        return td


def types_of(ids):
    return {"mm_token_type_ids": (ids == IMAGE).int()}


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    return ImageBook(str(tmp_path_factory.mktemp("images")))


def given_to_images(forwards, book):
    """Ids [N, L, K] that experts were given for the tokens of images of each sequence, by its tokens."""
    found = [(forward, *each) for forward in forwards for each in forward.find(book.by_tokens())]
    return {
        tokens: forward.ids_LRK()[:, rows[np.array(tokens) == IMAGE]].swapaxes(0, 1) for forward, tokens, rows in found
    }


@pytest.mark.shows("verl, FSDP engine", "images (Qwen3-VL-MoE), packed and padded, on one rank")
@pytest.mark.parametrize(
    "layout", [{}, {"use_fused_kernels": True}, {"use_remove_padding": False}], ids=["packed", "fused", "padded"]
)
def test_routes_of_images_are_followed_and_the_mismatch_falls(group, book, layout):
    k3, fused = {}, {"use_fused_kernels": "use_fused_kernels" in layout}
    for replay in ("R3", "disabled"):
        engine = make(book.folder, replay, lr=0.0, model=fused)
        old_log_probs(engine, book.tensordict(**layout))  # the first rollout is checked
        with watched(engine.module) as forwards:
            old_log_probs(engine, book.tensordict(**layout))
        given, expected = given_to_images(forwards, book), book.by_tokens()
        assert given.keys() == expected.keys()
        follows = [
            np.array_equal(given[tokens], routes[np.array(tokens)[:-1] == IMAGE])
            for tokens, routes in expected.items()
            if IMAGE in tokens
        ]
        metrics = update(engine, book.tensordict(**layout))["metrics"]
        k3[replay] = metrics["mismatch/k3"][0]
        if replay == "R3":
            assert all(follows)
            assert metrics["mismatch/disagreement"] == [0.0]
        else:
            assert not all(follows)
            assert metrics["mismatch/disagreement"][0] > 0.05
    assert k3["R3"] < k3["disabled"] / 4, k3
