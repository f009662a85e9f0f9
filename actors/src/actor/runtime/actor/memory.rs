//! Release of the memory that an engine held.

use crate::engine::EngineArguments;

/// Releases all memory that an engine's attempts may hold. The threads end first, because a thread
/// that still used memory after it was unmapped would crash the process.
pub(super) async fn release_memory(arguments: &EngineArguments) {
    let owner = arguments.last_owner();
    arguments.weight_store.shut_down(owner.generation).await;
    for owner in [owner, arguments.vision_owner()] {
        // This call fails only if the runtime has ended. There is no ledger to update then.
        let _ = arguments.budget.clear(owner).await;
    }
}

/// Releases the same memory as `release_memory`, then the weights and the executor.
pub(super) async fn release_all_memory(arguments: &EngineArguments) {
    release_memory(arguments).await;
    clear_weights(arguments).await;
    arguments.weight_store.clear_executor().await;
}

/// Releases the weights, whether they are on the device or in host memory.
pub(super) async fn clear_weights(arguments: &EngineArguments) {
    let (weights, model) = arguments.weight_store.clear();
    // When an owner is cleared, the ledger counts its host memory as returned at once. The copy in
    // host memory must therefore be freed first.
    arguments.weight_store.spare_is_gone().await;
    for owner in weights.into_iter().chain([arguments.sleep_owner()]) {
        let _ = arguments.budget.clear(owner).await;
    }
    drop(model);
}
