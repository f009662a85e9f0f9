//! Bursar.
