"""The language's internals, from dims to staged programs; see README.md in this folder."""
