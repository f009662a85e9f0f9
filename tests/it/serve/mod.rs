//! The server: requests of clients, refusals and shutdown.

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
mod thinking;
mod tls;
mod tools;
