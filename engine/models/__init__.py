"""transformers' models, unchanged, bound to our paged attention through its attention interface.

`families` says which models are computed correctly here, `loading` reads a directory, `binding` joins model, pages and
progress word. Must not know: requests and schedulers.
"""
