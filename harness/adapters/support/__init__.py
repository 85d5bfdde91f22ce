"""Parts that adapters of several trainers share."""
