// error: E0133
use memferry_engine::Descriptor;
use memferry_engine::completion::Chunk;

fn reports(invitation: &Descriptor) {
    invitation.finish_claimed(Chunk { offset: 0, length: 4096 }, Ok(None));
}

fn main() {}
