//! Deaths of each actor and lane: each accepted request ends exactly once with the expected reply,
//! weights are kept, and all bytes are returned.

mod cell;
mod faults;
mod loops;
mod stories;
mod supervisors;
mod table;
mod world;
