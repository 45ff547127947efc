"""The live page: what it shows (state), as HTML (page) and as pictures (pictures)."""
