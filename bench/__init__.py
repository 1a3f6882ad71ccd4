"""`python -m bench`: time, memory and error of linear cross-entropy, ours and others', in one run."""
