//! Owned buffers: they move into the transfer, which returns them at completion.
//!
//! `cargo run --release -p memferry --example owned`

use memferry::{Buffer, Ferry};

#[allow(clippy::print_stdout, reason = "an example shows something")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    const BYTES: usize = 64 << 20;
    let ferry = Ferry::new()?;
    let mut source = Buffer::new(BYTES)?;
    source.fill(7);

    let transfer = ferry.icopy(source, Buffer::new(BYTES)?)?;
    // The program continues; the compiler prevents access to the buffers meanwhile.
    let answer: u64 = (1..=1_000_000u64).map(|n| n.wrapping_mul(n)).sum();
    let was_done = transfer.is_done();
    let (source, target) = transfer.wait()?;

    assert_eq!(source[..], target[..]);
    println!("computed {answer} while 64 MiB moved (done before the wait: {was_done})");
    Ok(())
}
