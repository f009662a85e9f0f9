//! What a start will come to by plan, what it lacks, and what would help. Pure.

mod advice;
mod forecast;
mod min_ranks;
mod suggestion;
mod unfit;

pub(crate) use advice::advice;
pub use forecast::{Forecast, Question};
pub use min_ranks::{FewestRanks, NoRanksFit, PlacementQuery, RanksLack, RanksTried};
pub use suggestion::{Change, Suggestion, TOTAL};
pub use unfit::{Lack, Unfit};
