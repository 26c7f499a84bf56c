# The release as a stranger gets it. Included by the Makefile, which names BIN (the trainer's environment) and READY.

.PHONY: wheel-check

# sdist and wheel, the wheel in a clean environment without torch, and every extra from the wheel's files: a minute
wheel-check: $(READY)
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist . >/dev/null
	$(BIN)/python make/wheel_check.py dist
