# Scores: the conformance kit on the replay of others. It runs on the environment of make/peers.mk, behind which the Makefile
# includes this file; PEERS_ENV, PEERS_READY and KERNELS are named before. SCORES_PACKAGES are verl, for its controller, and
# what twinkle imports.

SCORES_PACKAGES := verl==0.9.1 pyzmq==27.3.0 pillow==12.3.0
SCORES_FOLDER := $(PEERS_ENV)/with-scores
SCORES_READY := $(SCORES_FOLDER)/.ready-$(call hash,make/scores.mk)

.PHONY: scores night-scores

$(SCORES_READY): $(PEERS_READY)
	$(PEERS_ENV)/bin/pip install --quiet --no-deps --ignore-requires-python --upgrade --target $(SCORES_FOLDER) $(SCORES_PACKAGES)
	touch $@

# the table of tests/conformance/peers/README.md, written anew
scores: $(SCORES_READY) $(KERNELS)
	PYTHONPATH="$(CURDIR)/src" $(PEERS_ENV)/bin/python -m tests.conformance.peers --page

# the same, held against that page
night-scores: $(SCORES_READY) $(KERNELS)
	PYTHONPATH="$(CURDIR)/src" $(PEERS_ENV)/bin/python -m tests.conformance.peers
