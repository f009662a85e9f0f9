//! Memory for your own code, under the same ledger as a model.
//!
//! `cargo run --release --example 4_lease_beside_a_model`

use bursar::{Class, LoadOptions, MIB, ModelSource, Runtime, RuntimeConfig};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let runtime = Runtime::start(RuntimeConfig::default()).await?;
    // Half of what is left goes to the model's cache, the rest stays for others.
    let options = LoadOptions { memory_fraction: 0.5, ..LoadOptions::default() };
    runtime.load_with(ModelSource::demo(), options, |_| {}).await?;

    let lease = runtime.budget().lease(Class::tenant("my-index"), 64 * MIB).await?;
    println!("{}\n", runtime.budget().snapshot().await?);
    println!("{} of {} are mine until I drop the lease.", lease.bytes(), lease.class());
    drop(lease);

    match runtime.budget().lease(Class::tenant("my-index"), 4096 * MIB).await {
        Ok(_) => unreachable!("the device is smaller than that"),
        Err(error) => println!("4 GiB: {error}\n hint: {}", error.hint()),
    }
    runtime.shutdown().await;
    Ok(())
}
