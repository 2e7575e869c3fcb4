"""The product's recipes, one TOML file each."""
