//! cuBLASLt, looked for at run time: a binary with and without it is the same.

mod library;
mod products;
mod search;

pub(super) use library::Blas;
pub(super) use products::{Described, FEW_ROWS, GemmAlgorithm, Places, Product, Products};
pub use search::BlasSearch;
