"""What methods that learn from a replay of past decisions share: critics, their slow copies, minibatches."""
