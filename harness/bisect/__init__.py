"""What broke a law: a commit of a trainer, or a version of a package."""
