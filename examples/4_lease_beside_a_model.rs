//! Memory for your own code in the same ledger as a model: a lease, a segment that backs
//! it, a refusal with the number of missing bytes, and a lease that waits until another
//! lease is released.
//!
//! `cargo run --release --example 4_lease_beside_a_model`

use bursar::{Bytes, Class, Hint, LoadOptions, MIB, ModelSource, Runtime, RuntimeConfig, Segment};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let runtime = Runtime::start(RuntimeConfig::default()).await?;
    // Half of the remaining memory goes to the model's cache. The other half stays free.
    let options = LoadOptions { memory_fraction: Some(0.5), ..LoadOptions::small() };
    runtime.load_with(ModelSource::demo(), options, |_| {}).await?;

    // A lease is the right to a number of bytes. A segment backs it with memory at fixed addresses.
    // A workspace (`bursar::Workspace`) would use the segment as a stack.
    let budget = runtime.budget();
    let lease = budget.lease(Class::external("my-index"), 64 * MIB).await?;
    let index = Segment::reserve(runtime.device(), lease.bytes(), lease)?;
    index.back_to(index.lease().bytes())?;
    println!("{}", budget.snapshot().await?);
    println!("{} of {} are mine, at {}.\n", index.backed(), index.lease().class(), index.address());

    let whole = budget.snapshot().await?.total;
    match budget.lease(Class::external("my-index"), whole).await {
        Ok(_) => return Err("a lease of the whole device was granted".into()),
        Err(error) => println!("{whole}: {error}\n hint: {}\n", error.hint()),
    }

    // While too little memory is free, `try_lease` refuses at once and `lease` waits.
    let free = budget.snapshot().await?.free;
    let error =
        budget.try_lease(Class::external("cache"), free + Bytes::mib(16)).await.expect_err("some memory is in use");
    println!("{} more than is free: {error}\n", Bytes::mib(16));
    let waiting = tokio::spawn({
        let budget = budget.clone();
        async move { budget.lease(Class::external("cache"), free + Bytes::mib(16)).await }
    });
    while budget.snapshot().await?.waiting.is_empty() {
        tokio::task::yield_now().await;
    }
    println!(
        "The cache waits. The index is dropped: its memory returns to the device, then its bytes return to the ledger."
    );
    drop(index);
    let cache = waiting.await??;
    println!("{} of {} are mine until I drop the lease.", cache.bytes(), cache.class());
    runtime.shutdown().await;
    Ok(())
}
