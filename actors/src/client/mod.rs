//! The client side of a model: chats, whose tasks run outside the actors and send messages to them.

pub mod chat;
