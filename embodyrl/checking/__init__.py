"""The promises that simulators and models keep, tried one by one: `embodyrl check`, and the package's own suite."""
