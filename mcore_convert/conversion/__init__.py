"""From one checkpoint to another: target, plan, execution."""
