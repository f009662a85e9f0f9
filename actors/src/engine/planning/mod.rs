//! What a start will come to by plan, what it lacks, and what would help. Pure.

mod advice;
mod fewest;
mod forecast;
mod suggestion;
mod unfit;

pub(crate) use advice::advice;
pub use fewest::{FewestRanks, NoRanksFit, RanksLack, RanksTried, Sought};
pub use forecast::{Forecast, Question};
pub use suggestion::{Change, Suggestion, TOTAL};
pub use unfit::{Lack, Unfit};
