"""A trainer is brought in: what its script says of itself, an adapter begun from that, and its examination."""
