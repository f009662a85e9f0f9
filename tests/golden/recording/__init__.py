"""Records the golden reference cases with Hugging Face transformers.

`../make.py` is the entry point, `parts.py` lists the parts that it can record, and every model family has a module. Only
`archives.py` works without torch and transformers.
"""
