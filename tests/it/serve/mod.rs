//! The server: what clients send, how it refuses, and how it ends.

mod answers;
mod broken;
mod burdens;
mod client;
mod endings;
mod films;
mod forms;
mod hostile;
mod kept;
mod limits;
mod lines;
mod places;
mod queues;
mod tls;
mod tools;
