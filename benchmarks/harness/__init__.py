"""Tools that benchmark cases share, and the parts of one that are files of their own."""
