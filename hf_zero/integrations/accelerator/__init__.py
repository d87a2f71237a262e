"""What an Accelerator does differently when it trains with an engine."""
