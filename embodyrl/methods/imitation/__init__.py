"""What methods that imitate share: the supervised loss of a policy, in minibatches of demonstrations or labels."""
