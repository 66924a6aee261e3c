"""Hardware profiles: the rates and networks of machines, from TOML files with their sources."""
