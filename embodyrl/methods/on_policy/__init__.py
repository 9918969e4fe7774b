"""Methods that learn from their newest rollout: PPO, GRPO, DAPO, RLOO, REINFORCE++, Dr.GRPO, GSPO, CPGD, SRPO."""
