//! The server: requests of clients, refusals and shutdown.

mod answers;
mod broken;
mod client;
mod endings;
mod forms;
mod hostile;
mod hostile_load;
mod limits;
mod lines;
mod placement;
mod queues;
mod stored_responses;
mod thinking;
mod tls;
mod tools;
mod videos;
