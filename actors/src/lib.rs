//! The actors that hold leases and serve requests: pure decisions inside, thin messages outside.
