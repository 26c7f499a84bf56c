"""What an update minimises: small functions, each with its formula and source, over response tokens.

    rewards ─ advantages ─▶ A        log-probs ─ ratios ─▶ r        trainer over engine ─ corrections ─▶ w
                            └──────────────── surrogates: l(r, A) · w, + β · kl ────────────────┘
                                                        │
                                                      means: coefficient of a token, and what the sum is divided by

A mini-batch's loss is Σ c_t l_t / D with a coefficient c_t that depends on nothing but the token's own sequence, and
one number D of the whole mini-batch. So it does not depend on how the mini-batch is cut into micro-batches, nor on
which rank takes which sequence.

Axis letters: R response tokens, packed sequence after sequence, S sequences; `lengths_S` are the tokens of each.
"""
