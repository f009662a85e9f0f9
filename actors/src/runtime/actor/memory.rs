//! Takes back what an engine held.

use crate::engine::EngineArguments;

/// Returns all memory that an engine's attempts may hold. The threads end first: a thread that still used memory after
/// it was unmapped would crash the process.
pub(super) async fn release_memory(arguments: &EngineArguments) {
    let owner = arguments.last_owner();
    arguments.weight_store.shut_down(owner.generation).await;
    for owner in [owner, arguments.vision_owner()] {
        // Only a runtime that is gone has no budget actor, and then there is no ledger either.
        let _ = arguments.budget.clear(owner).await;
    }
}

/// As `release_memory`, then returns the weights too.
pub(super) async fn release_all_memory(arguments: &EngineArguments) {
    release_memory(arguments).await;
    clear_weights(arguments).await;
    arguments.weight_store.clear_processor().await;
}

/// Returns the weights, wherever they are.
pub(super) async fn clear_weights(arguments: &EngineArguments) {
    let (weights, model) = arguments.weight_store.clear();
    // The ledger takes host memory for home at once.
    arguments.weight_store.spare_is_gone().await;
    for owner in weights.into_iter().chain([arguments.sleep_owner()]) {
        let _ = arguments.budget.clear(owner).await;
    }
    drop(model);
}
