//! cuBLASLt, loaded at run time, so that the same binary runs with and without it.

mod library;
mod products;
mod search;

pub(super) use library::Blas;
pub(super) use products::{Described, FEW_ROWS, GemmAlgorithm, Numbers, Places, Product, Products};
pub use search::BlasSearch;
