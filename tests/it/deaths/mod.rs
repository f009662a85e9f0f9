//! Deaths of each actor and lane: each accepted request ends exactly once with the expected reply,
//! weights are kept, and all bytes are returned. If the runtime ends, each request ends with one
//! typed error instead.

mod cell;
mod faults;
mod loops;
mod stories;
mod supervisors;
mod table;
mod world;
