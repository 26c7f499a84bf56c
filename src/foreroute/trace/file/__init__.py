"""Traces on disk: one safetensors file, written whole or not at all, read whole or in part, every byte of it sealed.

    header      the model, the provenance, the tables below, and one seal over all of it
    runs        sequence 0 = run 0 + run 2, sequence 1 = run 0 + run 3, ...    a shared prompt is stored once
    rows        stored row   0 1 2 3 ...                  token, validity bit; weight versions as spans
    blocks      block 0: rows 0 .. 1023    block 1: rows 1024 .. 2100 ...      cut where sequences begin
    payloads    block 0: layer 0, layer 1, ...            block 1: layer 0, layer 1, ...
                the picks of the routed rows of one block in one layer, coded, with a seal of its own
    streams     the same once more for each further decision on these rows, such as sampling masks

A reader of some sequences and layers finds their runs, reads the blocks that hold them, and there the payloads of its
layers. `docs/formats.md` is the whole format; `writing` and `reading` go this way, `format` is the header, `codec`
the coding of one block, `streams` what lies beside the routes, `store` the folder of a run.
"""
