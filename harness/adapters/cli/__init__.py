"""What can be typed behind the commands on adapters: init and doctor."""
