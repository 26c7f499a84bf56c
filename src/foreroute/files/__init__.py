"""Bytes in and out, at paths and URLs: regular files alone are opened, none is mapped, each is replaced in one step.

No format lives here: what bytes mean is the business of the room that reads them. Nothing of it is public.
"""
