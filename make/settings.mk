# Libraries that some settings need and no extra asks for, in an environment of their own: they change what transformers,
# PEFT and TRL do where they are merely there. Included by the Makefile, which names PYTHON, PYTEST, KERNELS and hash.

SETTINGS_ENV ?= .venv-settings
SETTINGS_LIBRARIES := deepspeed==0.19.8 bitsandbytes==0.50.2 torchao==0.18.0
SETTINGS_READY := $(SETTINGS_ENV)/.ready-$(call hash,pyproject.toml constraints.txt make/settings.mk)

.PHONY: settings-env night-settings

settings-env: $(SETTINGS_READY)

$(SETTINGS_READY):
	@echo "making $(SETTINGS_ENV) and installing torch, DeepSpeed, bitsandbytes and torchao into it: some minutes, 2 GB"
	test -d $(SETTINGS_ENV) || $(PYTHON) -m venv $(SETTINGS_ENV)
	$(SETTINGS_ENV)/bin/pip install --quiet --upgrade pip
	$(SETTINGS_ENV)/bin/pip install --quiet --constraint constraints.txt torch
	$(SETTINGS_ENV)/bin/pip install --quiet --constraint constraints.txt --editable '.[trl]' --group test $(SETTINGS_LIBRARIES)
	rm -f $(SETTINGS_ENV)/.ready*
	touch $@

# DeepSpeed on two processes of this machine, over gloo; in other environments these tests are skipped, here they fail
night-settings: $(SETTINGS_READY) $(KERNELS)
	FOREROUTE_SETTINGS=all $(SETTINGS_ENV)/bin/$(notdir $(PYTEST)) tests/settings
