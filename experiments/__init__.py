"""The measurements behind the tables and pictures of README.md; experiments/README.md has the commands."""
