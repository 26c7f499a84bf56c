# The release as a stranger gets it. Included by the Makefile, which names BIN (the trainer's environment), READY and
# CHECKING.

.PHONY: dist wheel-check release

# sdist and wheel of foreroute, and of foreroute-core, into dist/
dist: $(READY) $(CHECKING)
	rm -rf dist
	$(BIN)/python make/release.py build dist

# the wheel in a clean environment without torch, the core alone, and every extra from the wheel's files: a minute
wheel-check: dist
	$(BIN)/python make/release.py check dist

# all of both in clean environments of each Python that is here, and what a person must do to publish: some minutes.
# Torch is tried where pip finds a build for CPUs, or any, of gigabytes: make release RELEASE_TORCH=any
PYTHONS ?= python3.11 python3.12 python3.13
release: dist
	$(BIN)/python make/release.py try dist $(PYTHONS)
