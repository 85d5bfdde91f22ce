"""Running: one case from its launch to its verdict, and many cases side by side."""
