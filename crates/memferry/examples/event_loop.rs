//! Futures and event loops: a program waits for transfers and other events.
//!
//! `cargo run --release -p memferry --example event_loop`

use std::os::fd::AsRawFd;

use memferry::Ferry;

#[allow(clippy::print_stdout, reason = "an example shows something")]
#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let ferry = Ferry::new()?;

    // A transfer is a future, on any executor.
    let copies = (1..=4u8).map(|value| {
        let ferry = ferry.clone();
        tokio::spawn(async move {
            let transfer = ferry.icopy(vec![value; 4 << 20], vec![0u8; 4 << 20])?;
            transfer.await.map(|(_, target)| target[0])
        })
    });
    for copy in copies.collect::<Vec<_>>() {
        println!("arrived: {}", copy.await??);
    }

    // A transfer also provides an eventfd for `poll` and `epoll`.
    let transfer = ferry.icopy(vec![9u8; 4 << 20], vec![0u8; 4 << 20])?;
    let event = transfer.event()?;
    println!("descriptor {} becomes readable at the end", event.as_raw_fd());
    let (_, target) = transfer.wait()?;
    assert_eq!(target[0], 9);
    Ok(())
}
