//! The client side: what a chat does in its caller's task, between the actors that it asks.

pub mod chat;
