//! ipc-channel as a peer: its channels of bytes, one for each direction. What is compared is memory
//! to memory, so what arrives in a new vector is copied into the receiver's own buffer.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use ipc_channel::ipc::{
    IpcBytesReceiver, IpcBytesSender, IpcOneShotServer, IpcSender, bytes_channel,
};

use super::messages::{Buffers, Link, pingpong};
use super::order::{Order, Task, Timing};
use super::plain::Touched;
use super::worker::{Member, WorkerArgs};

/// The file in which the first member says where it waits for the second.
const MEETING_POINT: &str = "meeting-point";
/// How long the first may take to say so.
const PATIENCE: Duration = Duration::from_secs(20);

type Ends = (IpcBytesSender, IpcBytesReceiver);

struct Channels {
    to: IpcBytesSender,
    from: IpcBytesReceiver,
}

struct IpcChannel {
    channels: Channels,
    is_first: bool,
    held: Option<Buffers<Touched<u8>>>,
}

/// Meets the other member.
pub(super) fn join(args: &WorkerArgs) -> anyhow::Result<impl Member + use<>> {
    ensure!(args.size == 2, "two members play pingpong");
    let is_first = args.rank == 0;
    let (to, from) = if is_first { wait_for_second()? } else { go_to_first()? };
    Ok(IpcChannel { channels: Channels { to, from }, is_first, held: None })
}

fn wait_for_second() -> anyhow::Result<Ends> {
    let (server, name) = IpcOneShotServer::<Ends>::new()?;
    let (draft, point) =
        (std::env::temp_dir().join("draft"), std::env::temp_dir().join(MEETING_POINT));
    // Renamed, so that the second never reads half a name.
    fs::write(&draft, name)?;
    fs::rename(draft, point)?;
    Ok(server.accept()?.1)
}

fn go_to_first() -> anyhow::Result<Ends> {
    let point = std::env::temp_dir().join(MEETING_POINT);
    let deadline = Instant::now() + PATIENCE;
    let name = loop {
        if let Ok(name) = fs::read_to_string(&point) {
            break name;
        }
        ensure!(Instant::now() < deadline, "the first member did not come");
        std::thread::sleep(Duration::from_millis(1));
    };
    let ((to_second, from_first), (to_first, from_second)) = (bytes_channel()?, bytes_channel()?);
    IpcSender::<Ends>::connect(name)?.send((to_second, from_second))?;
    Ok((to_first, from_first))
}

impl Link for Channels {
    fn send(&mut self, message: &[u8]) -> anyhow::Result<()> {
        Ok(self.to.send(message)?)
    }

    fn receive(&mut self, message: &mut [u8]) -> anyhow::Result<()> {
        let arrived = self.from.recv()?;
        ensure!(arrived.len() == message.len(), "a message of {} bytes arrived", arrived.len());
        message.copy_from_slice(&arrived);
        Ok(())
    }
}

impl Member for IpcChannel {
    fn carry_out(&mut self, order: Order) -> anyhow::Result<Timing> {
        let Task::Pingpong { bytes } = order.task else { bail!("can only play pingpong") };
        let (bytes, times) = (usize::try_from(bytes)?, order.iterations);
        pingpong(&mut self.channels, self.is_first, &mut self.held, bytes, times)
    }
}
