"""How bytes get in and out, at paths and URLs: only files are opened, none is mapped, each is written whole or not.

No format lives here: what the bytes mean is the business of the room that reads them. TOML configurations, which
several rooms have, are read and checked by `config_file`. Nothing of it is public.
"""
