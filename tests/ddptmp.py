import torch, json, tempfile, os, sys
import torch.distributed as dist
sys.path.insert(0,'.')
from clipstream.model.settings import ModelSettings, LossSettings
from clipstream.model.towers import build_towers
from clipstream.model.losses import build_loss
from clipstream.world import World
def play(world, name):
    out={}
    n=[3,2][world.rank] if world.size==2 else 5; s=3*world.rank
    for lt in ('clip','siglip'):
        t=build_towers(ModelSettings(name=name),seed=3,loss_type=lt).double()
        g=torch.Generator().manual_seed(0)
        px=torch.randint(0,256,(5,3,32,32),generator=g,dtype=torch.uint8); ids=torch.randint(0,400,(5,16),generator=g,dtype=torch.int32)
        m=torch.nn.parallel.DistributedDataParallel(t,gradient_as_bucket_view=True) if world.size>1 else t
        for _ in range(2):
            m.zero_grad()
            f=m(px[s:s+n],ids[s:s+n])
            l=build_loss(LossSettings.model_validate({}),lt)(f,torch.ones(n),world,5)*world.size
            l.backward()
        out[lt]={k:p.grad.clone().numpy() for k,p in t.clip.named_parameters()}
    return out
if __name__=='__main__':
    from tests.ranks import run_ranks
    d=tempfile.mkdtemp(); cfg={"embed_dim":32,"vision_cfg":{"image_size":32,"layers":2,"width":64,"patch_size":8,"head_width":32},"text_cfg":{"context_length":16,"vocab_size":49408,"width":64,"heads":2,"layers":2}}
    open(d+'/tiny.json','w').write(json.dumps(cfg))
    a=play(World(),d+'/tiny.json'); 
    import tests.ddptmp as T
    b=run_ranks(2,T.play,d+'/tiny.json')[1]
    for lt in a: print(lt, max(abs(a[lt][k]-b[lt][k]).max() for k in a[lt]))
