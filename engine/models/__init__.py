"""transformers' models, bound to our paged attention.

`families` says which models are computed correctly here, `loading` reads a directory, `binding` joins model, pages and
progress word and leaves the model's code as it is (`latent_cache`: where a model keeps latent vectors instead of K and
V). `llama_like` computes the same from the same weights by our own kernels (`dense`); `choice` takes it where it covers
the model. Must not know: requests and schedulers.
"""
