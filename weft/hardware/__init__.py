"""Hardware profiles: rates and links of accelerators, from TOML files with their sources."""
