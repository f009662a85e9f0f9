//! Deaths: whatever dies, every accepted request ends once and as it would have, weights stay, and all bytes return.

mod blow;
mod cell;
mod loops;
mod stories;
mod supervisors;
mod table;
mod world;
