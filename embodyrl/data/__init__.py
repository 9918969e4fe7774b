"""Demonstrations: reading and writing them (LeRobotDataset v3), recording them, and making batches of them."""
