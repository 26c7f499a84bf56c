# Scores: the conformance kit on the replay of others, and our decoders on the code that writes their routes. Both run on the
# environment of make/peers.mk, behind which the Makefile includes this file; PEERS_ENV, PEERS_READY and KERNELS are named
# before. The packages of SCORES_PACKAGES are read, not imported, but for verl's controller and what twinkle imports.

SCORES_PACKAGES := skyrl==0.3.0 ms-swift==4.6.0 areal==1.0.4 verl==0.9.1 \
	pyzmq==27.3.0 pillow==12.3.0
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
	PYTHONPATH="$(CURDIR)/src:$(CURDIR)/$(SCORES_FOLDER)" $(PEERS_ENV)/bin/python -m pytest -q tests/capture/test_peer_code.py
	PYTHONPATH="$(CURDIR)/src" $(PEERS_ENV)/bin/python -m tests.conformance.peers
